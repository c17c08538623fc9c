"""Request and response types. Decoding, error messages and the OpenAPI document are derived from them.

The docstrings of types and the `doc` of fields are the descriptions in the OpenAPI document. An optional field of a
request may be null. Read first: native.py, then openai.py.

- types: numbers with ranges, metadata, and checks that several types share
- parameters: the fields of sampling parameters, made from the table in microkernel/messages/sampling_params.py
- native, native_responses: requests and responses of TGI's routes
- messages: Anthropic's protocol; responses: OpenAI's newer one
- openai: the fields that chats and completions share; chat, completions: the rest of them; openai_responses: responses
- adapters, info, cloud (SageMaker and Vertex AI), kserve: types of the other routes
"""
