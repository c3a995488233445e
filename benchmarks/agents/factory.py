"""The embedded agent as an environment of TRL's `environment_factory`: its public methods are the tools."""

from mt_grpo.data.embedded import tool


class Encyclopedia:
    def reset(self, **row):
        self.searches = 0

    def search(self, query: str) -> str:
        """
        Search the corpus.

        Args:
            query: What to look for.
        """
        self.searches += 1
        return tool.search(query)
