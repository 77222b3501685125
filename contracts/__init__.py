"""What the trainer, the weight service and the fleet agree on. Imports none of them."""
