"""tgi: a text generation server that speaks TGI's wire contract on a ZeroMQ multi-process microkernel."""

__version__ = "0.1.0"

# The release of Hugging Face's TGI whose HTTP contract is served; clients enable features by it.
CONTRACT_VERSION = "3.3.6"

INTERRUPTED = 130  # the exit code after Ctrl-C, as a shell counts an end by SIGINT
