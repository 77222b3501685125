"""The fleet: gateway, router, engines and episodes. Never imports the trainer."""
