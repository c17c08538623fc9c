"""Images in the worker. Read in this order:

- `prompt_images.py`: the images of the requests in the slots, and what they add to a batch.
- `image_file.py`: reads and checks the file of an image, which a media process has written.
- `received_images.py`: gets the files of images from other hosts.
- `tower.py`: the model's vision tower and projector, from transformers.
- `tower_run.py`: computes an image in slices, between which the worker does other work.
- `features.py`: what a tower makes of an image.
- `cpu_layers.py`: their layers on our CPU kernels.
- `feature_cache.py`: what the tower has computed, by the content of the image.
- `rope_positions.py`: positions with several axes (mrope).
"""
