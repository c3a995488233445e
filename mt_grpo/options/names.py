"""What other trainers call our options, and how an option that is not known is refused."""

from __future__ import annotations

from collections.abc import Iterable

from mt_grpo.errors import ConfigError
from mt_grpo.imports import did_you_mean

CUTOFF = 0.82
"""How near, of 1, the name of an option must be to be guessed."""

SYNONYMS = {
    "model_name_or_path": "model model_name model_path model_id base_model pretrained_model_name_or_path",
    "model_revision": "revision",
    "dtype": "torch_dtype model_dtype precision",
    "attn_implementation": "attn_impl flash_attn use_flash_attn use_flash_attention use_flash_attention_2",
    "dataset_name": "dataset dataset_path dataset_id data data_path train_file train_files train_dataset",
    "dataset_config": "dataset_config_name dataset_subset subset",
    "dataset_train_split": "train_split dataset_split split",
    "dataset_test_split": "test_split eval_split val_split validation_split dataset_eval_split",
    "dataset_streaming": "streaming",
    "outcome_reward_funcs": "reward_funcs reward_func reward_functions reward_function reward_fn rewards reward orms "
    "reward_model reward_model_name_or_path custom_reward_function",
    "turn_reward_funcs": "step_reward_funcs step_rewards turn_rewards process_reward_funcs",
    "tools_config_file": "tool_config tool_config_path tool_config_file tools_config tools_config_path",
    "interaction_config_file": "interaction_config interaction_config_path",
    "external_plugins": "plugin plugins plugin_path external_plugin",
    "system_prompt": "system default_system system_message",
    "call_protocol": "agent_template tool_call_parser tool_parser",
    "max_env_steps": "max_tool_calls max_tool_turns max_tool_rounds max_assistant_turns max_user_turns max_num_turns",
    "max_turn_length": "max_turn_tokens max_tokens_per_turn",
    "max_completion_length": "max_response_length response_length max_new_tokens max_tokens max_gen_len "
    "rollout_max_response_len",
    "vllm_max_model_length": "max_length max_seq_length max_seq_len max_model_len max_model_length vllm_max_model_len",
    "num_generations": "group_size rollout_n rollouts_per_example rollouts_per_prompt n_samples_per_prompt "
    "num_samples num_return_sequences n_generations n_rollouts num_rollouts_per_prompt",
    "num_generations_eval": "eval_n val_n n_samples_per_eval_prompt num_eval_generations",
    "per_device_train_batch_size": "batch_size train_batch_size micro_batch_size per_device_batch_size "
    "ppo_mini_batch_size ppo_micro_batch_size_per_gpu rollout_batch_size global_batch_size",
    "per_device_eval_batch_size": "eval_batch_size val_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation grad_accum grad_accum_steps grad_accumulation_steps",
    "learning_rate": "lr actor_lr actor_learning_rate",
    "lr_scheduler_type": "lr_scheduler scheduler lr_schedule lr_decay_style",
    "warmup_steps": "warmup warmup_ratio lr_warmup_steps lr_warmup_steps_ratio num_warmup_steps",
    "num_train_epochs": "epochs epoch num_epochs n_epochs total_epochs train_epochs",
    "max_steps": "steps num_steps total_steps train_steps num_train_steps training_steps total_training_steps "
    "max_train_steps",
    "beta": "kl kl_coef kl_coeff kl_beta kl_loss_coef init_kl_coef",
    "epsilon": "clip_ratio clip_ratio_low clip_range cliprange clip_eps clip_epsilon eps_clip",
    "epsilon_high": "clip_ratio_high clip_high eps_clip_high",
    "num_iterations": "mu ppo_epochs num_ppo_epochs",
    "entropy_coef": "entropy_coeff ent_coef entropy_loss_coef",
    "scale_rewards": "norm_adv_by_std_in_grpo normalize_advantages normalize_rewards",
    "advantage_estimator": "adv_estimator advantage_type algorithm rl_algorithm rlhf_type",
    "max_grad_norm": "grad_clip clip_grad gradient_clipping clip_grad_norm grad_norm",
    "optim": "optimizer optimiser",
    "mask_truncated_completions": "overlong_filter overlong_filtering",
    "use_peft": "use_lora lora peft enable_lora train_type tuner_type finetuning_type peft_config",
    "lora_r": "lora_rank lora_dim rank r peft_r",
    "lora_alpha": "alpha peft_alpha",
    "lora_target_modules": "target_modules lora_target lora_modules",
    "lora_modules_to_save": "modules_to_save",
    "load_in_4bit": "use_4bit load_4bit qlora use_qlora",
    "load_in_8bit": "use_8bit load_8bit",
    "gradient_checkpointing": "use_gradient_checkpointing enable_gradient_checkpointing",
    "sp_size": "sequence_parallel_size ulysses_sequence_parallel_size context_parallel_size cp_size",
    "use_vllm": "vllm fast_inference",
    "vllm_gpu_memory_utilization": "gpu_memory_utilization",
    "vllm_tensor_parallel_size": "tensor_parallel_size tensor_model_parallel_size tp tp_size rollout_tp",
    "vllm_server_base_url": "vllm_base_url vllm_server_url vllm_url server_url base_url",
    "vllm_server_host": "vllm_host",
    "vllm_server_port": "vllm_port",
    "vllm_enable_sleep_mode": "enable_sleep_mode sleep_level",
    "max_concurrent_rollouts": "max_concurrent max_concurrency max_num_seqs",
    "max_staleness": "max_async_level async_level max_off_policy_steps max_head_offpolicyness staleness_threshold",
    "output_dir": "output output_path save_dir save_path default_local_dir checkpoint_dir ckpt_dir ckpt_path",
    "run_name": "experiment_name exp_name wandb_run_name trackio_run_name",
    "project": "project_name wandb_project",
    "report_to": "logger loggers log_with wandb use_wandb use_tensorboard",
    "logging_steps": "log_steps log_interval log_every log_freq logging_interval",
    "save_steps": "save_freq save_interval save_every ckpt_interval",
    "save_total_limit": "max_checkpoints max_actor_ckpt_to_keep max_ckpt_to_keep",
    "eval_strategy": "evaluation_strategy",
    "eval_steps": "eval_freq eval_interval eval_every test_freq",
    "do_eval": "evaluate val_before_train eval_before_train",
    "eval_on_start": "eval_at_start",
    "resume_from_checkpoint": "resume resume_from resume_mode load_checkpoint",
    "seed": "random_seed",
}
"""What other trainers, and people, call our options: by our name of each, separated by spaces."""


def refuse_unknown(
    name: str,
    written: str,
    known: Iterable[str],
    otherwise: str = "`mt-grpo train --help-all` lists all that there are",
) -> None:
    """
    Refuses an option that is not among the known ones. Says what one of another trainer is called here, else the
    nearest in spelling where it is near, not any of 250.
    """
    known = list(known)
    if name not in known:
        word = name.lower().replace("-", "_")
        other = next((own for own, others in SYNONYMS.items() if word in others.split()), None)
        if other in known:
            raise ConfigError(f"{written} is unknown: here it is `{other}`.")
        raise ConfigError(f"{written} is unknown{did_you_mean(name, known, cutoff=CUTOFF) or f': {otherwise}'}.")
