# reads the log, writes output.json
