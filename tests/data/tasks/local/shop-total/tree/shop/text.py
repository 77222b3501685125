def label(word):
    return word.upper()
