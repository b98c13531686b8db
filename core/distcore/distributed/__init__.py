"""torch.distributed for strategies: process group, flat buffers, devices, agreement between ranks."""
