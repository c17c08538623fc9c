"""tgi: a text generation server that speaks TGI's wire contract on a ZeroMQ multi-process microkernel.

Read docs/architecture.md first. cli and launcher are the commands, server starts the process tree, and the packages
api, tokenizer, scheduler and worker are the roles, on top of hub (models) and microkernel (messages, supervision,
settings).
"""

__version__ = "0.1.0"

# The release of Hugging Face's TGI whose HTTP contract is served; clients enable features by it.
CONTRACT_VERSION = "3.3.6"

INTERRUPTED = 130  # exit code after Ctrl-C: 128 + SIGINT, as in a shell
