"""Read trained models of nnU-Net v2, and prepare and finish a case as its predictor does.

    folder          the folder of a model: the network, the weights of each fold, and the facts below
    plans, dataset  the facts of plans.json and dataset.json, checked
    architecture    the layers that the plans describe, and which arrays of a checkpoint hold their weights
    checkpoint      the arrays of a checkpoint, read without running anything in it
    images          the files of a case
    preprocessing   crop, normalise and resample
    export          from logits to the labels of the voxels of the files

Only `checkpoint` needs PyTorch. Resampling and cropping need the extra `nnunet`.
"""
