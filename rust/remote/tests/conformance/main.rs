//! The contract of remote stores, over every kind: a directory always, Redis where `redis-server` is on PATH, and S3 where
//! `UNDERCROFT_TEST_S3` has the URL of a bucket (`make test-remote`).

#![expect(clippy::unwrap_used, reason = "a failed step of a test fails the test")]

mod cases;
#[cfg(feature = "s3")]
mod cloud;
mod collecting;
mod directory;
mod encrypted;
#[cfg(any(feature = "redis", feature = "s3"))]
mod faults;
#[cfg(any(feature = "redis", feature = "s3"))]
mod proxy;
mod rig;
#[cfg(feature = "redis")]
mod server;

/// One test for each case, over the store that `open` gives. Without one, says why.
macro_rules! conformance {
    ($store:ident, $open:path) => {
        mod $store {
            conformance!(@cases $open,
                an_object_is_read_as_it_was_written,
                only_the_parts_that_are_asked_for_are_touched,
                an_object_is_kept_if_it_is_put_again_as_absent_and_replaced_otherwise,
                what_is_not_there_is_not_found,
                a_probe_tells_each_of_64_objects,
                another_object_under_the_name_is_corrupt_and_goes,
                a_changed_payload_is_corrupt_and_goes,
                an_object_that_ends_early_is_corrupt,
                every_request_of_many_ends_once,
                objects_are_listed_and_removed,
                dropping_the_pool_ends_its_operations,
                the_clock_of_the_store_is_near,
            );
        }
    };
    (@cases $open:path, $($case:ident,)*) => {
        $(#[test]
        fn $case() {
            match $open() {
                Ok(rig) => crate::cases::$case(rig),
                Err(reason) => eprintln!("skipped: {reason}"),
            }
        })*
    };
}

conformance!(file, crate::rig::file);
#[cfg(feature = "redis")]
conformance!(redis, crate::rig::redis);
#[cfg(feature = "s3")]
conformance!(s3, crate::rig::s3);
