"""The lab: populations with known truth, training in process, theory, studies."""
