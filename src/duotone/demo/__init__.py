"""A local page: one question, answered live from a 16-bit and a few-bit cache.

`turns` lets two answers share a model, and `answers` makes events of them. `gallery` holds
pictures, `choices` the schemes, and `server` speaks HTTP with the files in `page/`.
"""
