"""Networks: encoder, transition head, ExLM and MLM, heads of tasks."""
