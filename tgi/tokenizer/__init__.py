"""The tokenizer process: prompts to token ids, generated token ids to text. It imports neither torch nor transformers.

Read `pool` first: TokenizerPool handles all messages of the process without sockets; `main` connects it to the links.

- main: the process; its loop moves messages between the links, the pool and the job threads.
- pool: TokenizerPool, all requests of the process.
- message_checks: sizes and ranges that the types of a message leave open.
- schedulers: the replicas of the scheduler, which of them gets a request, and their common status.
- replica_choice: the rule of that choice, by prefixes, load and adapters.
- request: TokenizerRequestState, the state of one request, from Generate to End.
- resumable_streams: ResumableStreams, between apis and pool: requests that continue without their client.

Text to token ids:

- encoder: prompts and tokenize requests to ids; the limits on token counts.
- encoding_jobs: which requests are encoded in a thread, and these threads.
- segment_cache: the ids of text segments between special tokens, so that a chat's history is encoded once.
- vocabulary: tokenizer.json, and the text or bytes of each token id.
- chat: chats as clients send them to prompt text; adapts messages and tools to the template.
- chat_template: Jinja2 chat templates, and the features that a template's syntax tree shows.
- structured_output: grammars, JSON schemas and the grammars of tool calls.

Token ids to text:

- output_processor: the tokens of one step to Texts messages for the apis.
- detokenizer: incremental detokenization of one request.
- stop_strings: stop-string matcher, and the filter that hides stop strings.
- answers: how models write tool calls and reasoning, as a table, and the parser of streamed answers.
- prompt_logprobs: prompt tokens with logprobs for the api.

Also: adapters (the LoRA adapters that a request may name).
"""
