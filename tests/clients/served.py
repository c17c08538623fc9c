"""What the checks of all clients share: where the servers are, and a question whose answer is known."""

import os

URL = os.environ["TGI_URL"]  # the demo model
GUARDED_URL, KEY = os.environ["TGI_GUARDED_URL"], os.environ["TGI_KEY"]  # a server that wants a key
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
MESSAGES = [{"role": "user", "content": QUESTION}]
PROMPT = (
    f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"  # the same as the model's template writes it
)
