//! Builds that leave kinds of stores out.

use undercroft_remote::{Location, RemoteOptions};

#[test]
fn a_build_without_a_kind_of_store_names_the_feature() {
    for (url, feature, is_there) in [
        ("s3://bucket/x", "remote-s3", cfg!(feature = "s3")),
        ("gs://bucket/x", "remote-s3", cfg!(feature = "s3")),
        ("az://container/x", "remote-s3", cfg!(feature = "s3")),
        ("redis://host/0", "remote-redis", cfg!(feature = "redis")),
        ("rediss://host/0", "remote-redis", cfg!(feature = "redis")),
    ] {
        let location = Location::parse(url).unwrap();
        let says_so = format!("{url}\": this undercroft was built without the feature {feature}");
        for open in [undercroft_remote::open, undercroft_remote::open_for_engine] {
            let opened = open(&location, RemoteOptions::default());
            let refused = opened.map_or_else(|error| error.to_string(), |_| String::new());
            assert_eq!(refused.contains(&says_so), !is_there, "{refused}");
        }
    }
}
