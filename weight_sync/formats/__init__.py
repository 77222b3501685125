"""Encoders and decoders of weight formats: arrays in, arrays out.

Each module owns the bit layout of one format. None reads files, knows tensor names, or imports
anything of the project beyond `contracts` and its siblings.

Shape letters: N rows (output features), K columns (input features, contiguous, the dimension that
is summed over), B blocks of 16 along K.
"""
