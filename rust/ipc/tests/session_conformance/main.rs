//! The contract of [`Session`](undercroft_contract::session::Session), run on each of its implementations: a
//! session of an engine in this process, and a client of a server on a Unix socket.

#![expect(clippy::unwrap_used, reason = "a failed step of a test fails the test")]

mod disk;
mod events;
mod hints;
mod lookups;
mod resets;
mod rig;
mod saves;
mod transfers;

/// Tests of one implementation.
macro_rules! conformance {
    ($implementation:ident, $variant:ident: $($module:ident { $($name:ident),* $(,)? })*) => {
        mod $implementation {
            $(
                mod $module {
                    $(
                        #[test]
                        fn $name() {
                            crate::$module::$name(crate::rig::Implementation::$variant);
                        }
                    )*
                }
            )*
        }
    };
}

/// The same tests for each implementation.
macro_rules! conformance_of_all {
    ($($tests:tt)*) => {
        conformance!(embedded, Embedded: $($tests)*);
        conformance!(served, Served: $($tests)*);
    };
}

conformance_of_all! {
    lookups {
        a_prompt_that_was_never_saved_is_a_miss,
        an_answer_says_why_it_has_no_more,
        a_saved_prompt_is_a_hit_in_every_session_of_the_namespace,
        another_namespace_shares_nothing,
        a_hit_ends_at_the_limit_and_at_the_alignment,
        computed_tokens_are_not_fetched,
        a_hit_stays_away_from_the_end_by_the_dropped_tokens,
        shared_tokens_count_the_chain_above_a_missing_state,
        a_prefetch_that_was_leased_is_loaded_without_another_lookup,
        a_lookup_that_has_ended_leases_nothing,
        requests_that_are_unknown_are_ignored,
        a_closed_session_keeps_nothing_and_finds_nothing,
        a_broken_engine_has_misses,
    }
    transfers {
        a_lease_keeps_the_bytes_of_a_hit_until_its_load_has_ended,
        a_part_of_a_hit_is_loaded,
        a_load_that_no_hit_covers_is_refused,
        a_hit_is_loaded_once,
        a_load_continues_when_its_request_has_finished,
        a_failed_load_makes_later_lookups_of_its_request_misses,
        transfers_that_are_unknown_are_ignored,
    }
    saves {
        a_save_is_found_when_it_has_ended_and_not_before,
        a_failed_save_is_not_found,
        a_save_of_cached_blocks_has_nothing_to_copy,
        a_save_starts_where_the_last_one_of_its_request_ended,
        a_save_without_its_prefix_takes_no_slot,
        several_saves_are_under_way_at_a_time,
        a_save_without_memory_is_refused_and_granted_later,
        offered_blocks_of_a_window_are_saved_with_new_blocks_and_with_cached_ones,
        a_hit_loads_the_window_before_its_end,
    }
    disk {
        a_prompt_on_disk_is_pending_until_it_was_promoted,
        a_wait_for_a_prefetch_ends_with_its_promotion,
        a_wait_ends_when_the_device_hangs,
        a_wait_ends_with_the_time_that_the_request_may_wait,
        a_promotion_that_takes_longer_than_its_wait_is_a_miss,
        waits_that_end_are_told_once_and_others_go_on,
        lookups_that_a_caller_has_ended_are_no_waits,
        a_planned_wait_takes_a_part_of_the_time_of_the_steps_that_were_reported,
        nothing_is_read_for_a_hit_that_is_too_short_to_be_of_use,
        a_leased_prefetch_keeps_its_bytes_from_promotions_that_are_demanded,
    }
    events {
        saved_blocks_are_reported_with_their_parents,
        every_session_of_a_namespace_gets_events_of_old_and_new_blocks,
        evicted_blocks_are_reported,
        blocks_on_disk_are_reported_also_after_a_restart,
        a_reset_clears_all_reported_blocks,
        a_restart_of_the_events_reports_all_blocks_and_clears_none,
        a_session_that_takes_no_events_for_long_gets_all_blocks_anew,
    }
    hints {
        a_pinned_prompt_outlives_a_flood,
        pins_beyond_the_budget_end_the_one_that_was_used_least_recently,
        a_pin_that_exceeds_the_budget_or_the_cached_prefix_is_clipped,
        blocks_that_pins_share_count_once_and_a_name_has_one_pin,
        a_pin_ends_after_its_time_unless_it_is_used,
        a_name_is_that_of_a_pin_of_the_same_namespace,
        a_reset_ends_the_pins_of_the_namespace,
        a_prefetch_brings_a_prompt_from_disk_although_its_request_has_finished,
        a_demoted_prompt_leaves_host_memory_first,
        a_demotion_evicts_no_other_prompt_and_no_pin,
    }
    resets {
        nothing_of_before_a_reset_is_found_or_loaded,
        a_reset_leaves_other_sessions_the_bytes_of_their_hits,
        a_session_that_was_reset_shares_with_no_other,
        other_weights_are_nobody_elses_and_their_hits_go_on,
        weights_with_a_name_are_shared_under_it,
        a_load_that_was_given_up_may_be_repeated,
        the_end_of_a_session_is_no_failure,
        a_closed_session_resets_nothing,
        a_reset_is_durable,
    }
}
