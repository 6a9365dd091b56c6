"""Result files as Markdown tables; numbers in a README come from here."""
