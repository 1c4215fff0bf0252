//! The contract of remote stores, over every kind: a directory always, Redis if `redis-server` is on PATH, S3 if
//! `UNDERCROFT_TEST_S3` has the URL of a bucket, and Mooncake if `UNDERCROFT_TEST_MOONCAKE` names a Python with its
//! wheel (`make test-remote` sets both variables).

#![expect(clippy::unwrap_used, reason = "a failed step of a test fails the test")]

mod cases;
mod child;
#[cfg(feature = "s3")]
mod cloud;
#[cfg(feature = "redis")]
mod cluster;
mod collecting;
mod directory;
mod encrypted;
#[cfg(feature = "redis")]
mod expiry;
mod fake_mooncake;
#[cfg(feature = "s3")]
mod fakes;
#[cfg(any(feature = "redis", feature = "s3"))]
mod faults;
mod foreign;
mod left_out;
mod liars;
mod mooncake;
mod priority;
#[cfg(any(feature = "redis", feature = "s3"))]
mod proxy;
#[cfg(feature = "s3")]
mod renewals;
mod rig;
#[cfg(feature = "redis")]
mod server;
#[cfg(feature = "redis")]
mod tls;

/// Gives the names of all cases to a macro.
macro_rules! each_case {
    ($to:ident $with:tt) => {
        $to! { $with
            an_object_is_read_as_it_was_written,
            only_the_parts_that_are_asked_for_are_touched,
            an_object_is_kept_if_it_is_put_again_as_absent_and_replaced_otherwise,
            an_absent_object_is_not_found,
            a_probe_reports_each_of_64_objects,
            another_object_under_the_name_is_corrupt_and_removed,
            a_changed_payload_is_corrupt_and_removed,
            an_object_that_ends_early_is_corrupt,
            every_request_of_many_ends_once,
            objects_are_listed_and_removed,
            dropping_the_pool_ends_its_operations,
            the_clock_of_the_store_is_near,
        }
    };
}

/// One test for each case, over the store that `$open` returns. Without a store, prints the reason.
macro_rules! tests {
    (($store:ident $open:path) $($case:ident,)*) => {
        mod $store {
            $(#[test]
            fn $case() {
                match $open() {
                    Ok(rig) => crate::cases::$case(rig),
                    Err(reason) => eprintln!("skipped: {reason}"),
                }
            })*
        }
    };
}

/// All cases in one test, for a store that takes long to start.
macro_rules! table {
    (() $($case:ident,)*) => {
        const CASES: &[(&str, fn(rig::Rig))] = &[$((stringify!($case), cases::$case),)*];
    };
}

each_case!(tests (file crate::rig::file));
#[cfg(feature = "redis")]
each_case!(tests (redis crate::rig::redis));
#[cfg(feature = "s3")]
each_case!(tests (s3 crate::rig::s3));
each_case!(table());
