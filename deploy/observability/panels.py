"""The dashboard's panels: what is drawn, from what. `dashboard.py` makes Grafana's file of them."""

from __future__ import annotations

from deploy.observability.queries import (
    D,
    G,
    K,
    Panel,
    Query,
    V,
    mean,
    per_minute,
    quantiles,
    rate,
    selected,
    share,
    total,
)

BAD = 'outcome=~"unavailable|internal|invariant_violation|lost_suffix|session_failed|deadline|error"'
GENERATE = 'method="generate"'

ROWS: dict[str, list[Panel]] = {
    "Users": [
        Panel(
            "Calls",
            "reqps",
            "Generate and Resume calls that ended, by how. `left`: the client went away.",
            [Query(rate(f"{G}_calls_total", "outcome") + " > 0 or " + rate(f"{G}_calls_total"), "{{outcome}}")],
        ),
        Panel(
            "Failed calls",
            "percentunit",
            "Of all calls: unavailable, internal, lost, late.",
            [Query(share(rate(f"{G}_calls_total", "", BAD), rate(f"{G}_calls_total")), "failed")],
        ),
        Panel(
            "Time to the first token",
            "s",
            "From the call to its first tokens, as the gateway sends them.",
            quantiles(f"{G}_first_token_seconds", GENERATE),
        ),
        Panel(
            "Time per token",
            "s",
            "Between tokens after the first ones, the mean of each call.",
            quantiles(f"{G}_token_seconds", GENERATE),
        ),
        Panel(
            "Tokens to clients",
            "short",
            "Per second, all gateways.",
            [Query(rate(f"{G}_tokens_total", "method"), "{{method}}")],
        ),
        Panel("Call duration", "s", "To the last event.", quantiles(f"{G}_call_seconds", GENERATE)),
        Panel(
            "Sessions",
            "short",
            "Running, their readers, those without a verifier, the limit.",
            [
                Query(total(f"{G}_held", 'what="sessions"'), "running"),
                Query(total(f"{G}_held", 'what="readers"'), "readers"),
                Query(total(f"{G}_waiting_sessions"), "without a verifier"),
                Query(total(f"{G}_session_limit"), "limit"),
            ],
        ),
        Panel(
            "Came back",
            "reqps",
            "Resume calls, take-overs, orphans that were paused.",
            [
                Query(rate(f"{G}_calls_total", "", 'method="resume"'), "resumed"),
                Query(rate(f"{G}_taken_over_total"), "taken over"),
                Query(rate(f"{G}_paused_total"), "paused"),
                Query(rate(f"{G}_calls_total", "", 'outcome="lost_suffix"'), "lost suffix"),
            ],
        ),
    ],
    "Steps": [
        Panel("Step", "s", "One round of draft, verify, accept for the whole batch.", quantiles(f"{V}_step_seconds")),
        Panel(
            "Where a step's time goes",
            "s",
            "Means. The store's answer is awaited beside it.",
            [
                Query(mean(f"{V}_draft_seconds"), "draft"),
                Query(mean(f"{V}_forward_seconds"), "verify"),
                Query(mean(f"{V}_accept_seconds"), "accept"),
            ],
            stacked=True,
        ),
        Panel(
            "Tokens per step",
            "short",
            "Of one sequence: one, and what its tree earned.",
            [
                Query(share(rate(f"{V}_tokens_total"), rate(f"{V}_batch_sequences_sum")), "tokens"),
            ],
        ),
        Panel(
            "Trees",
            "short",
            "Means: budgets, nodes of trees, nodes that the target agreed with.",
            [
                Query(mean(f"{V}_tree_budget"), "budget"),
                Query(mean(f"{V}_tree_nodes"), "nodes"),
                Query(mean(f"{V}_accepted_nodes"), "accepted"),
            ],
        ),
        Panel(
            "Batch",
            "short",
            "Sequences in a step that emits.",
            [Query(mean(f"{V}_batch_sequences"), "mean"), *quantiles(f"{V}_batch_sequences", of=(0.95,))],
        ),
        Panel(
            "Distinct experts",
            "short",
            "Whose weights a step reads: the mean of its layers that have experts.",
            [Query(mean(f"{V}_distinct_experts"), "mean"), *quantiles(f"{V}_distinct_experts", of=(0.95,))],
        ),
        Panel("Waiting for a place", "s", "Of sequences that ended.", quantiles(f"{V}_queue_seconds")),
        Panel(
            "Steps and drafts",
            "short",
            "Steps a second; of those with work for the drafter, what became of it.",
            [
                Query(rate(f"{V}_steps_total"), "steps"),
                Query(rate(f"{V}_drafts_total", "outcome"), "drafts {{outcome}}"),
                Query(rate(f"{V}_missed_drafts_total"), "missed"),
                Query(rate(f"{V}_refused_trees_total") + " or vector(0)", "trees refused"),
            ],
        ),
        Panel(
            "Drafter",
            "s",
            "A request's forward pass and the building of its trees, means.",
            [
                Query(mean(f"{D}_forward_seconds"), "forward"),
                Query(mean(f"{D}_build_seconds"), "build"),
            ],
        ),
    ],
    "Machine": [
        Panel(
            "Cache pages in use",
            "percentunit",
            "Of the latent cache. Sequences wait when the pages are gone.",
            [
                Query(f"1 - sum({selected(f'{V}_cache_free_pages')}) / sum({selected(f'{V}_cache_pages')})", "in use"),
            ],
        ),
        Panel(
            "Sequences",
            "short",
            "At the verifiers.",
            [
                Query(total(f"{V}_running_sequences"), "running"),
                Query(total(f"{V}_waiting_sequences"), "waiting"),
                Query(total(f"{V}_waiting_limit"), "may wait"),
            ],
        ),
        Panel(
            "Prompts",
            "short",
            "Tokens a second, of sequences that ended; of those that began, found in the prefix cache.",
            [
                Query(rate(f"{V}_prompt_tokens_total"), "prompt"),
                Query(rate(f"{V}_prefix_hit_tokens_total"), "not computed"),
            ],
        ),
        Panel(
            "Prefix cache",
            "percentunit",
            "Of prompt tokens, those that it had; of the latent cache, the pages that it keeps, in use or not.",
            [
                Query(share(rate(f"{V}_prefix_hit_tokens_total"), rate(f"{V}_prefix_query_tokens_total")), "hits"),
                Query(f"{total(f'{V}_prefix_pages')} / {total(f'{V}_cache_pages')}", "pages kept"),
            ],
        ),
        Panel(
            "Prefix cache, given back",
            "short",
            "Pages a minute, for sequences that needed them.",
            [Query(per_minute(f"{V}_prefix_reclaimed_pages_total"), "pages")],
        ),
        Panel(
            "Attachments",
            "short",
            "A minute: all, on what the verifier had, computed again.",
            [
                Query(per_minute(f"{G}_attached_total"), "attached"),
                Query(per_minute(f"{V}_adoptions_total"), "adopted"),
                Query(per_minute(f"{V}_rebuilds_total"), "rebuilt"),
                Query(per_minute(f"{V}_faults_total"), "faults"),
            ],
        ),
        Panel(
            "Verifiers and drafters",
            "short",
            "As each gateway and each verifier sees them.",
            [
                Query(f"min({selected(f'{G}_verifiers')})", "verifiers, at least"),
                Query(total(f"{V}_drafter_up"), "verifiers with a drafter"),
                Query(total(f"{D}_verifiers"), "streams at the drafters"),
            ],
        ),
        Panel(
            "CPU",
            "short",
            "Cores, by process.",
            [Query(f"rate({selected('process_cpu_seconds_total')}[$__rate_interval])", "{{instance}}")],
        ),
        Panel(
            "Memory",
            "bytes",
            "Resident, by process.",
            [Query(selected("process_resident_memory_bytes"), "{{instance}}")],
        ),
        Panel(
            "File descriptors",
            "percentunit",
            "Of what the process may have.",
            [Query(f"{selected('process_open_fds')} / {selected('process_max_fds')}", "{{instance}}")],
        ),
    ],
    "Store": [
        Panel(
            "Commit",
            "s",
            "An append, as the gateway waits for it. Nothing reaches a client before it.",
            quantiles(f"{G}_commit_seconds"),
        ),
        Panel(
            "Append at the kvstore",
            "s",
            "A message of one or more entries, Redis's answer included.",
            quantiles(f"{K}_append_seconds"),
        ),
        Panel("Redis", "s", "A round trip that was answered, whoever asked.", quantiles(f"{K}_redis_seconds")),
        Panel(
            "Entries",
            "short",
            "A second, by answer. The gateway looks into all but `ok`.",
            [Query(rate(f"{K}_appends_total", "status") + " > 0 or " + rate(f"{K}_appends_total"), "{{status}}")],
        ),
        Panel(
            "Redis, troubled",
            "short",
            "A minute: round trips without an answer, writes without replicas.",
            [
                Query(per_minute(f"{K}_redis_silences_total"), "silences"),
                Query(per_minute(f"{K}_redis_shortfalls_total"), "shortfalls"),
                Query(per_minute(f"{G}_store_moves_total"), "kvstore left"),
            ],
        ),
        Panel(
            "Redis memory",
            "bytes",
            "Used, and the most that it may use (0: no limit), by node.",
            [
                Query(selected(f"{K}_redis_memory_bytes"), "used {{node}}"),
                Query(selected(f"{K}_redis_memory_limit_bytes"), "limit {{node}}"),
            ],
        ),
        Panel(
            "Fail-over and repair",
            "short",
            "Sessions a minute. Repaired: the store had forgotten some.",
            [
                Query(per_minute(f"{G}_failed_over_total"), "failed over"),
                Query(per_minute(f"{G}_recovered_total"), "recovered"),
                Query(per_minute(f"{G}_repairs_total"), "repaired"),
                Query(per_minute(f"{G}_fenced_total"), "fenced"),
                Query(per_minute(f"{G}_given_up_total"), "given up"),
            ],
        ),
        Panel(
            "Time without a token after a loss",
            "s",
            "Of sessions whose verifier was lost or refused them.",
            [
                Query(share(rate(f"{G}_recovery_seconds_total"), rate(f"{G}_recovered_total")), "recovery"),
            ],
        ),
    ],
}
