"""What every task needs of data: records from files, a cache on disk, batches from a sampler."""
