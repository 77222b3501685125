# reads the log
