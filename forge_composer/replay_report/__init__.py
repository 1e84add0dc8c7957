"""The economics of a replay: what asking teachers costs, takes and gives, and a verdict."""
