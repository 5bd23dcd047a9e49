"""Look at volumes, predictions and labels: in Neuroglancer, in a browser, or as a picture of slices."""
