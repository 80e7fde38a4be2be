"""Split-KV MLA decode attention for sm_100a: a cluster of two CTAs for each work item.

One work item is (query tile of 128 rows, request, run of key tiles). Each CTA holds 64 of the rows,
loads 64 of a tile's 128 keys and half of the value columns; the leader's MMA warp issues the
cta_group::2 products for both.

    warps    role         one key tile i                                             registers
    0-3      softmax      S(i) -> maximum -> factor(i), P(i) as e4m3                       208
    4-7      correction   O *= factor(i) if the maximum moved; the result at the end       232
    8        mma          S(i) = Q K(i)^T, two tiles ahead of O += P(i) V(i)                64
    9        load_k       K(i): 64 keys x 576 columns                                       64
    10       load_qv      Q once, then V(i): 128 keys x 256 columns                         64
    11       tail         zeroes the value rows past the request's end                      64

    tensor core   S0 S1 |S2 PV0|S3 PV1|S4 PV2| ...
    softmax          s0   s1     s2    s3     ...

Registers: 128 * (208 + 232 + 64) = 64512 of 65536. Each role is one module.
"""
