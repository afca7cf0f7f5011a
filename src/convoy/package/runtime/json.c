/* JSON of a package: strict, bounded in depth, without recursion deeper than that. */
#include "internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define MOST_DEPTH 40
#define BLOCK (1u << 16)

struct json_memory {
    struct json_memory *next;
    size_t used, size;
    char bytes[];
};

typedef struct {
    const char *at, *end;
    json_memory *memory;
    bool failed;
} reader;

static void *take(reader *r, size_t size) {
    size = (size + 15) & ~(size_t)15;
    if (!r->memory || r->memory->size - r->memory->used < size) {
        size_t wanted = size > BLOCK ? size : BLOCK;
        json_memory *made = malloc(sizeof *made + wanted + 16);
        if (!made) {
            r->failed = true;
            return NULL;
        }
        *made = (json_memory){r->memory, 0, wanted};
        r->memory = made;
    }
    void *found = r->memory->bytes + r->memory->used;
    r->memory->used += size;
    return found;
}

void *json_take(json_memory **memory, size_t count, size_t size) {
    reader r = {.memory = *memory};
    if (size && count > ((size_t)1 << 40) / size) return NULL;
    void *found = take(&r, count * size + 1);
    *memory = r.memory;
    if (found) memset(found, 0, count * size);
    return found;
}

static bool refuse(reader *r) {
    r->failed = true;
    return false;
}

static void skip_spaces(reader *r) {
    while (r->at < r->end && strchr(" \t\r\n", *r->at) && *r->at) r->at++;
}

static bool next_is(reader *r, char wanted) {
    skip_spaces(r);
    if (r->at == r->end || *r->at != wanted) return false;
    r->at++;
    return true;
}

static bool word(reader *r, const char *text) {
    size_t length = strlen(text);
    if ((size_t)(r->end - r->at) < length || memcmp(r->at, text, length)) return false;
    r->at += length;
    return true;
}

static int hex(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

/* Four hex digits as UTF-8; surrogates become two or three bytes of their own, which no name has. */
static char *put_code(char *to, unsigned code) {
    if (code < 0x80)
        *to++ = (char)code;
    else if (code < 0x800) {
        *to++ = (char)(0xC0 | code >> 6);
        *to++ = (char)(0x80 | (code & 63));
    } else {
        *to++ = (char)(0xE0 | code >> 12);
        *to++ = (char)(0x80 | (code >> 6 & 63));
        *to++ = (char)(0x80 | (code & 63));
    }
    return to;
}

/* A text after its quotation mark; NULL if it does not end. */
static const char *text(reader *r) {
    const char *end = r->at;
    while (end < r->end && *end != '"') end += *end == '\\' ? 2 : 1;
    if (end >= r->end) return refuse(r), NULL;
    char *made = take(r, (size_t)(end - r->at) + 1), *to = made;
    if (!made) return NULL;
    while (r->at < end) {
        char c = *r->at++;
        if ((unsigned char)c < 32) return refuse(r), NULL;
        if (c != '\\') {
            *to++ = c;
            continue;
        }
        c = *r->at++;
        const char *from = "\"\\/bfnrt", *plain = "\"\\/\b\f\n\r\t", *place = c ? strchr(from, c) : NULL;
        if (place)
            *to++ = plain[place - from];
        else if (c == 'u' && end - r->at >= 4) {
            unsigned code = 0;
            for (int i = 0; i < 4; i++) {
                int digit = hex(*r->at++);
                if (digit < 0) return refuse(r), NULL;
                code = code << 4 | (unsigned)digit;
            }
            if (!code) return refuse(r), NULL;
            to = put_code(to, code);
        } else
            return refuse(r), NULL;
    }
    *to = 0;
    r->at++;
    return made;
}

static void number(reader *r, json *made) {
    char digits[64];
    size_t length = 0;
    bool whole = true;
    while (r->at < r->end && length < sizeof digits - 1 && *r->at && strchr("+-0123456789.eE", *r->at)) {
        whole &= !strchr(".eE", *r->at);
        digits[length++] = *r->at++;
    }
    digits[length] = 0;
    char *end = digits;
    errno = 0;
    made->kind = whole ? JSON_INTEGER : JSON_NUMBER;
    if (whole)
        made->number = (double)(made->integer = strtoll(digits, &end, 10));
    else
        made->number = strtod(digits, &end);
    if (!length || *end || errno || *digits == '+') refuse(r);
}

static json *value(reader *r, int depth);

/* The values of a list or object, up to its end. */
static void values(reader *r, json *made, char end, int depth) {
    json **last = &made->first;
    if (next_is(r, end)) return;
    do {
        const char *key = NULL;
        if (made->kind == JSON_OBJECT) {
            if (!next_is(r, '"')) {
                refuse(r);
                return;
            }
            key = text(r);
            if (!r->failed && !next_is(r, ':')) refuse(r);
        }
        if (r->failed || !(*last = value(r, depth + 1))) return;
        (*last)->key = key;
        last = &(*last)->next;
        made->count++;
    } while (next_is(r, ','));
    if (!next_is(r, end)) refuse(r);
}

static json *value(reader *r, int depth) {
    json *made = take(r, sizeof *made);
    if (!made || depth > MOST_DEPTH) return refuse(r), NULL;
    *made = (json){.kind = JSON_NULL};
    skip_spaces(r);
    if (next_is(r, '{')) {
        made->kind = JSON_OBJECT;
        values(r, made, '}', depth);
    } else if (next_is(r, '[')) {
        made->kind = JSON_LIST;
        values(r, made, ']', depth);
    } else if (next_is(r, '"')) {
        made->kind = JSON_TEXT;
        made->text = text(r);
    } else if (word(r, "true"))
        made->kind = JSON_TRUE;
    else if (word(r, "false"))
        made->kind = JSON_FALSE;
    else if (!word(r, "null"))
        number(r, made);
    return r->failed ? NULL : made;
}

const json *json_parse(const uint8_t *text_, size_t size, json_memory **memory) {
    reader r = {(const char *)text_, (const char *)text_ + size, NULL, false};
    json *made = value(&r, 0);
    skip_spaces(&r);
    if (r.failed || r.at != r.end) {
        json_free(r.memory);
        *memory = NULL;
        return NULL;
    }
    *memory = r.memory;
    return made;
}

void json_free(json_memory *memory) {
    while (memory) {
        json_memory *next = memory->next;
        free(memory);
        memory = next;
    }
}

const json *json_get(const json *object, const char *key, json_kind kind) {
    if (!object || object->kind != JSON_OBJECT) return NULL;
    for (const json *one = object->first; one; one = one->next)
        if (!strcmp(one->key, key)) return one->kind == kind ? one : NULL;
    return NULL;
}

bool json_count(const json *object, const char *key, int64_t most, int64_t *result) {
    const json *found = json_get(object, key, JSON_INTEGER);
    if (!found || found->integer < 0 || found->integer > most) return false;
    *result = found->integer;
    return true;
}
