"""Ids of the special tokens that training and configuration name (Kimi's offsets from the last rank)."""

RANKS = 3840
BOS, EOS, IM_END, IM_USER, IM_ASSISTANT = (RANKS + k for k in (0, 1, 2, 3, 4))
IM_MIDDLE, MEDIA_PAD, THINK, END_THINK = (RANKS + k for k in (17, 21, 22, 23))
UNK, PAD = RANKS + 254, RANKS + 255
