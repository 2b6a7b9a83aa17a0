"""The optimizer states that are known to be elementwise: one element for each element of their parameter."""

from __future__ import annotations

# Sources: torch/optim, facebookresearch/schedule_free, NVIDIA/apex, NVIDIA/TransformerEngine and bitsandbytes/optim.
# `master_param` and `fp32_param` are fp32 master weights.
ELEMENTWISE = frozenset(
    [
        *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "exp_avg_slow", "exp_avg_diff", "exp_avg_res"),
        *("momentum_buffer", "momentum", "square_avg", "acc_delta", "grad_avg", "sum", "ax", "z", "prev", "step_size"),
        "variance",
        *("master_param", "fp32_param", "prev_grad", "previous_grad", "neg_pre_grad", "state1", "state2"),
    ]
)
# some optimizers have one for each row or slice
SECOND_MOMENTS = frozenset(["exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"])
# of optax, google-deepmind/optax/_src and contrib: fields of its states that have the tree of the parameters
OPTAX = frozenset(
    [
        *("mu", "nu", "nu_max", "trace", "v", "v_row", "v_col", "m", "m1", "m2", "sum_of_squares", "acc_grads"),
        *("hessian", "exp_inf", "delta", "grad_sum", "prev_grad", "g_before", "e_g", "e_x"),
    ]
)
