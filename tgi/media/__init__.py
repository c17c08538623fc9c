"""The media process: images of requests, from a URL or encoded bytes to the tensors that the model's vision tower gets.

It imports no torch: transformers' image processors compute with numpy and PIL. Read `loader` first.

- main: the process; its loop moves messages between the link and the threads.
- loader: ImageLoader, the way of one image, and the threads that go it.
- fetcher: images from URLs, of public hosts alone.
- decoder: files to pixels, within limits.
- processor: the model's own processor, which makes tensors and prompt ids of pixels.
- store: the media directory, which holds what was made for the worker.
"""
