#!/bin/bash
pytest -v ${1//,/ }
