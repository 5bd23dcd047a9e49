"""Read networks of other frameworks: PyTorch modules and exported programs, ONNX files, bioimage.io descriptions."""
