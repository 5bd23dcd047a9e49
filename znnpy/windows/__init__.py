"""Windows that MONAI and nnU-Net compute one by one and blend: where they lie, their weights, and the definition."""
