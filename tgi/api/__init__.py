"""The api process: HTTP in front, tokenizer processes behind.

Read operations.py first: the table of all routes. A request then passes through these modules, in this order:

  http_server    connections, their limits, and the server; tls: its certificate
  model_dispatch on a server of several models: which one a request is for; models: which are loaded
  app            the falcon application: middleware and error handlers
  routes/        one module per group of routes; they decode (json_body), answer, and format (native, chat, completions)
  resumption     ids of events, for clients that come back
  service        settings and router, and the steps that all routes share; body_reader: limits of incomplete bodies
  generation     from a decoded request to its generations, and from those to the response
  pooling        the same of models that end in a vector
  requests       live requests to the tokenizers, and the record of an HTTP request
  admission      permits of the clients, and the limits of their keys
  router         which tokenizer has which request, and what happens when one is lost
  downstream     links to the processes below, and which of them has which request
  tokenizers     what is known of each tokenizer, and which one gets a request
  token_delivery hands received tokens to the requests
  token_columns  tokens in columns, and their JSON
  sse            server-sent events of a streamed response
  response_store what POST /v1/responses keeps; batch_store: files and batches; sqlite_store: what they share
  batches        answers batches: their lines are requests of this process to itself

What a request may contain: shapes/ (types of bodies), request_parameters, validation (rules and TGI's messages),
rejected_fields (names that no shape has), chat_prompt, custom_tools, grammar. What responses consist of: answer (text,
reasoning and tool calls of one generation), openai_output, float32, errors.

Around it: main (the process), health (what /health tells), readiness (the probe before clients are admitted),
request_metrics, tracing, middleware, openapi (the document), docs (its page), asgi (types).
"""
