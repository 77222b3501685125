#!/bin/bash
wc -l /app/* > /app/counts.txt
