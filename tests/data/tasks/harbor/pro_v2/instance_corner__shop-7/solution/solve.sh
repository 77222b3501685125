git apply /solution/gold_patch.diff
