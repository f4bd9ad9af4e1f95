/* SHA-256 against the values of the standard and its examples. */
#include "support/check.h"

#include <stdio.h>
#include <string.h>

#include "base/sha256.h"

static void expect(const char *text, size_t times, const char *hex) {
    sthi_sha256 sha;
    unsigned char digest[32];
    char got[65];
    sthi_sha256_init(&sha);
    for (size_t i = 0; i < times; i++) sthi_sha256_add(&sha, text, strlen(text));
    sthi_sha256_end(&sha, digest);
    for (int i = 0; i < 32; i++) snprintf(got + 2 * i, 3, "%02x", digest[i]);
    assert_string_equal(got, hex);
}

static void the_examples_of_the_standard(void **state) {
    (void)state;
    expect("", 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    expect("abc", 1, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    expect("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 1,
           "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    expect("a", 1000000, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

/* Lengths round the end of a block, from `python3 -c "hashlib.sha256(b'a' * n)"`. */
static void lengths_at_the_end_of_a_block(void **state) {
    (void)state;
    expect("a", 55, "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318");
    expect("a", 56, "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a");
    expect("a", 63, "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34");
    expect("a", 64, "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb");
    expect("a", 65, "635361c48bb9eab14198e76ea8ab7f1a41685d6ad62aa9146d301d4f17eb0ae0");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_examples_of_the_standard),
        cmocka_unit_test(lengths_at_the_end_of_a_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
