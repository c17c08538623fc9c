"""What a chat's answer may hold besides text: reasoning and calls of tools. Their forms, grammar and division."""
