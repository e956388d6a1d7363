"""What is wrong with a plan, in words for its user."""


class PlanError(Exception):
    """A prediction that cannot be made; the text names the field and says what to do."""


UNFIT = (AttributeError, RuntimeError, TypeError, ValueError)
"""What modules raise that are made or called with something that they are not for."""
