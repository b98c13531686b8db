"""Token classification: a tag for each word, such as its part of speech or its named entity."""
