"""Both selection stages, estimated: enrollment once, participation round by round."""
