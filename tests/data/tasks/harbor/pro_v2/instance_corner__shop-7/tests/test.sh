#!/bin/bash
bash /tests/run_script.sh && echo 1 > /logs/verifier/reward.txt
