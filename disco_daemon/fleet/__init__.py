"""A fleet: which host has which part of a model, what that gains, what to change next. Pure, the clock is passed in."""
