"""What attention sees of the tokens before, as states: a layout each. rows.py has what layouts share."""
