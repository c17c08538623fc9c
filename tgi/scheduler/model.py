"""The drafts of the worker's draft model: nothing is known of them but how often they were right."""

# How often a draft is right before anything is known.
START = 0.7
# Weight of the newest draft in the share of right ones.
NEWEST = 0.1
# In each step without drafts the bad ones are forgotten by so much, until they are tried again.
FORGET = 0.01


class Model:
    """For one request."""

    __slots__ = ("chance",)

    def __init__(self) -> None:
        self.chance = START

    def verified(self, drafted: int, right: int) -> None:
        """So many were drafted, and of these the first `right` ones were drawn."""
        for place in range(min(drafted, right + 1)):
            self.chance += NEWEST * ((place < right) - self.chance)

    def rest(self) -> None:
        """It drafted nothing in a step."""
        self.chance += FORGET * (START - self.chance)
