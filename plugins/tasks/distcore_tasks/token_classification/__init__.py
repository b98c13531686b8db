"""Token classification: a label for each word of a sentence, such as its part of speech or the name it belongs to."""
