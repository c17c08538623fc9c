"""What the checks of all clients share: where the servers are, and a question whose answer is known."""

import os

URL = os.environ["TGI_URL"]  # the demo model
GUARDED_URL, KEY = os.environ["TGI_GUARDED_URL"], os.environ["TGI_KEY"]  # a server that wants a key
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
# With the system message that its template puts in by default, the small model wavers between English and French.
SYSTEM = "You answer questions on geography."
MESSAGES = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
