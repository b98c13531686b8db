"""Image classification: images in folders, Parquet files or arrays to a convolutional net
or a vision transformer.
"""
