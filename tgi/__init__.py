"""tgi: a text generation server that speaks TGI's wire contract on a ZeroMQ multi-process microkernel."""

__version__ = "0.1.0"
