#!/usr/bin/env bash
# Two nodes train and a third serves: sbatch recipes/cluster/slurm.sh RECIPE.yaml
# The recipe has `use_vllm: true`. Ten minutes before its time limit the run finishes its step, writes a checkpoint and
# is put into the queue again; also where it makes way for another job, if Slurm has PreemptParameters=send_user_signal.
# Give --signal longer if a step takes longer. After a lost node the same command goes on.
#SBATCH --job-name=mt-grpo
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
set -euo pipefail

RECIPE=${1:?give a recipe}
mapfile -t NODES < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RECIPE MAIN=${NODES[0]} SERVER=${NODES[2]} VLLM_API_KEY=${VLLM_API_KEY:-$(openssl rand -hex 32)}

# --ntasks, since srun would take that of the whole job.
srun --nodes=1 --ntasks=1 --nodelist="$SERVER" --overlap \
	mt-grpo serve --config "$RECIPE" --vllm_server_host 0.0.0.0 --replicas 8 &

# Single quotes: SLURM_PROCID is that of the node that the shell runs on.
# shellcheck disable=SC2016
srun --nodes=2 --ntasks=2 --nodelist="$MAIN,${NODES[1]}" --overlap bash -c '
	exec mt-grpo train "$RECIPE" --accelerate_config fsdp2 --num_processes 16 --num_machines 2 \
		--machine_rank "$SLURM_PROCID" --main_process_ip "$MAIN" --main_process_port 29500 --max_restarts 3 \
		--vllm_server_base_url "http://$SERVER:[8000-8007]" --weight_sync http \
		--save_strategy steps --save_steps 20 --resume_from_checkpoint auto --overwrite_output_dir true' &
TRAIN=$!
trap 'kill -USR1 "$TRAIN" || true' USR1 # the batch shell alone is signalled; srun passes it on
while kill -0 "$TRAIN" 2>/dev/null; do
	wait "$TRAIN" || true # a signal ends the waiting, too
done
STATUS=0
wait "$TRAIN" || STATUS=$? # which the shell remembers
kill %1 || true
# 75: the run was asked to end, and has a checkpoint to go on from
if [[ $STATUS == 75 ]]; then
	scontrol requeue "$SLURM_JOB_ID"
fi
exit "$STATUS"
