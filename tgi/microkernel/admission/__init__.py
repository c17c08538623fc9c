"""Who may have how many requests and tokens.

api_keys      the file of API keys, with the shares and limits of clients
permits       the limit of concurrent requests, shared by all front ends
token_rates   tokens per minute of each client, shared by all front ends
token_bucket  a limit on the rate of an action
"""
