"""The domains and their function templates, in the notation of `templates.py`.

Owns the table and which templates are held out. About every fifth is: its function occurs in no
training task, while its idioms (`max(a - b, 0)`, a loop with an `if`, ...) do elsewhere.
"""
# layout: a table, one entry per template

from __future__ import annotations

from sampler_fleet.episodes.tasks.templates import Domain, domain

DOMAINS: tuple[Domain, ...] = (
    domain(
        packages="shop store market",
        modules="cart bill stock",
        nouns="order sale bill cart",
        functions="""
# after coupon
def COMPUTE_NOUN(AMOUNT1, AMOUNT2):
    return max(AMOUNT1 - AMOUNT2, 0)

# with delivery (held out)
def COMPUTE_NOUN(AMOUNT1, COUNT, AMOUNT2):
    return AMOUNT1 * COUNT + AMOUNT2

# bulk
def COMPUTE_NOUN(AMOUNT, COUNT):
    if COUNT >= {5|10}:
        return AMOUNT * COUNT - {2|5}
    return AMOUNT * COUNT

# affordable
def CHECK_NOUN(AMOUNT, COUNT, LIMIT):
    return AMOUNT <= LIMIT and COUNT > 0

# large ones
def TOTAL_NOUN(ITEMS, LIMIT):
    ACC = 0
    for EACH in ITEMS:
        if EACH > LIMIT:
            ACC += EACH
    return ACC

# packs
def TALLY_NOUN(COUNT, RATE):
    return COUNT // RATE

# cheapest
def PICK_NOUN(ITEMS, AMOUNT):
    return min(ITEMS) + AMOUNT
""",
    ),
    domain(
        packages="bank vault ledger",
        modules="account loan transfer",
        nouns="loan debt payment saving",
        functions="""
# balance
def COMPUTE_NOUN(AMOUNT1, AMOUNT2, AMOUNT3):
    return AMOUNT1 + AMOUNT2 - AMOUNT3

# interest (held out)
def COMPUTE_NOUN(AMOUNT, RATE):
    return AMOUNT * RATE // {5|10}

# withdrawable (held out)
def CHECK_NOUN(AMOUNT, LIMIT, FLAG):
    return FLAG and AMOUNT <= LIMIT

# overdraft
def COMPUTE_NOUN(AMOUNT, LIMIT):
    if AMOUNT > LIMIT:
        return AMOUNT - LIMIT
    return 0

# fees
def TOTAL_NOUN(ITEMS, RATE):
    ACC = 0
    for EACH in ITEMS:
        ACC += EACH * RATE
    return ACC

# last
def PICK_NOUN(ITEMS):
    return ITEMS[-1]

# left over
def COMPUTE_NOUN(AMOUNT, RATE):
    return AMOUNT % RATE
""",
    ),
    domain(
        packages="library archive books",
        modules="shelf catalog reader",
        nouns="book page shelf author",
        functions="""
# overdue
def CHECK_NOUN(COUNT, LIMIT):
    return COUNT > LIMIT

# fine (held out)
def COMPUTE_NOUN(COUNT, LIMIT, RATE):
    if COUNT <= LIMIT:
        return 0
    return (COUNT - LIMIT) * RATE

# pages read
def COMPUTE_NOUN(LOW, HIGH):
    return HIGH - LOW + 1

# titled
def FORMAT_NOUN(TEXT):
    return TEXT.strip().upper()

# with prefix (held out)
def TALLY_NOUN(WORDS, PART):
    ACC = 0
    for EACH in WORDS:
        if EACH.startswith(PART):
            ACC += 1
    return ACC

# longest
def PICK_NOUN(WORDS):
    return max(len(EACH) for EACH in WORDS)

# first shelf
def PICK_NOUN(ITEMS, AMOUNT):
    return ITEMS[0] + AMOUNT
""",
    ),
    domain(
        packages="school campus academy",
        modules="grade exam pupil",
        nouns="grade exam pupil test",
        functions="""
# passed
def CHECK_NOUN(AMOUNT, LIMIT, FLAG):
    return AMOUNT >= LIMIT or FLAG

# average
def COMPUTE_NOUN(ITEMS):
    return sum(ITEMS) // len(ITEMS)

# above
def TALLY_NOUN(ITEMS, LIMIT):
    ACC = 0
    for EACH in ITEMS:
        if EACH >= LIMIT:
            ACC += 1
    return ACC

# bonus (held out)
def COMPUTE_NOUN(AMOUNT, COUNT):
    if COUNT > {2|5}:
        return AMOUNT + {5|10}
    return AMOUNT

# spread
def COMPUTE_NOUN(ITEMS):
    return max(ITEMS) - min(ITEMS)

# everybody
def CHECK_NOUN(ITEMS, LIMIT):
    return all(EACH >= LIMIT for EACH in ITEMS)

# without first
def PICK_NOUN(ITEMS):
    return ITEMS[1:]
""",
    ),
    domain(
        packages="garden farm orchard",
        modules="plant field soil",
        nouns="plant seed tree field",
        functions="""
# area
def COMPUTE_NOUN(AMOUNT1, AMOUNT2):
    return AMOUNT1 * AMOUNT2

# fence
def COMPUTE_NOUN(AMOUNT1, AMOUNT2):
    return (AMOUNT1 + AMOUNT2) * 2

# needs water
def CHECK_NOUN(AMOUNT, LIMIT, COUNT):
    return AMOUNT < LIMIT and COUNT >= {2|5}

# tallest
def PICK_NOUN(ITEMS, LIMIT):
    return min(max(ITEMS), LIMIT)

# ripe (held out)
def TALLY_NOUN(ITEMS, LOW, HIGH):
    ACC = 0
    for EACH in ITEMS:
        if EACH >= LOW and EACH < HIGH:
            ACC += 1
    return ACC

# rows
def COMPUTE_NOUN(COUNT, RATE):
    ACC = COUNT // RATE
    return ACC * RATE

# any dry (held out)
def CHECK_NOUN(ITEMS, LIMIT):
    return any(EACH < LIMIT for EACH in ITEMS)
""",
    ),
    domain(
        packages="travel tours trips",
        modules="route ticket hotel",
        nouns="trip route seat ticket",
        functions="""
# distance
def COMPUTE_NOUN(AMOUNT1, AMOUNT2):
    return abs(AMOUNT1 - AMOUNT2)

# arrival
def COMPUTE_NOUN(AMOUNT, COUNT):
    return (AMOUNT + COUNT) % 24

# free seats
def TALLY_NOUN(LIMIT, COUNT):
    return max(0, LIMIT - COUNT)

# can board (held out)
def CHECK_NOUN(COUNT, LIMIT, FLAG):
    return COUNT < LIMIT and FLAG

# child fare (held out)
def COMPUTE_NOUN(AMOUNT, COUNT):
    if COUNT < 12:
        return AMOUNT // 2
    return AMOUNT

# stops
def PICK_NOUN(WORDS, PLACE):
    return WORDS[:PLACE + 1]

# longest leg
def PICK_NOUN(ITEMS):
    ACC = ITEMS[0]
    for EACH in ITEMS:
        if EACH > ACC:
            ACC = EACH
    return ACC
""",
    ),
    domain(
        packages="kitchen bakery menu",
        modules="recipe oven pantry",
        nouns="dish cake meal bread",
        functions="""
# portion
def COMPUTE_NOUN(AMOUNT, COUNT, RATE):
    return AMOUNT * COUNT // RATE

# baking time
def COMPUTE_NOUN(AMOUNT, RATE):
    return AMOUNT * RATE + {5|10|20}

# done
def CHECK_NOUN(AMOUNT, LOW, HIGH):
    return LOW <= AMOUNT and AMOUNT <= HIGH

# missing (held out)
def COMPUTE_NOUN(AMOUNT, COUNT):
    if AMOUNT >= COUNT:
        return 0
    return COUNT - AMOUNT

# sweet ones
def PICK_NOUN(ITEMS, LIMIT):
    return [EACH for EACH in ITEMS if EACH > LIMIT]

# menu line
def FORMAT_NOUN(TEXT):
    return TEXT.lower().strip()

# not empty
def TALLY_NOUN(ITEMS):
    ACC = 0
    for EACH in ITEMS:
        if EACH != 0:
            ACC += 1
    return ACC
""",
    ),
    domain(
        packages="game league sport",
        modules="team match player",
        nouns="team goal player round",
        functions="""
# points
def COMPUTE_NOUN(COUNT, AMOUNT):
    return COUNT * 2 + AMOUNT

# winner
def PICK_NOUN(AMOUNT1, AMOUNT2):
    if AMOUNT1 > AMOUNT2:
        return AMOUNT1
    return AMOUNT2

# lead
def COMPUTE_NOUN(ITEMS):
    return ITEMS[0] - ITEMS[-1]

# qualified (held out)
def CHECK_NOUN(AMOUNT, COUNT, LIMIT):
    return AMOUNT > LIMIT or COUNT == 0

# hits
def TALLY_NOUN(ITEMS, AMOUNT):
    ACC = 0
    for EACH in ITEMS:
        if EACH == AMOUNT:
            ACC += 1
    return ACC

# penalty
def COMPUTE_NOUN(AMOUNT, COUNT):
    if COUNT > {2|5}:
        AMOUNT -= {2|5|10}
    return max(AMOUNT, 0)

# ranking
def PICK_NOUN(ITEMS):
    return sorted(ITEMS, reverse=True)
""",
    ),
    domain(
        packages="music radio studio",
        modules="song track band",
        nouns="song track tune album",
        functions="""
# length
def COMPUTE_NOUN(COUNT, AMOUNT):
    return COUNT * 60 + AMOUNT

# minutes (held out)
def COMPUTE_NOUN(AMOUNT, COUNT):
    return (AMOUNT + COUNT * 20) // 60

# next
def PICK_NOUN(ITEMS, PLACE):
    return ITEMS[(PLACE + 1) % len(ITEMS)]

# louder (held out)
def BOUND_NOUN(AMOUNT, RATE, LIMIT):
    return min(AMOUNT + RATE, LIMIT)

# is intro
def CHECK_NOUN(TEXT, PART):
    return TEXT.startswith(PART)

# playlist
def TOTAL_NOUN(ITEMS, AMOUNT):
    ACC = AMOUNT
    for EACH in ITEMS:
        ACC += EACH + 1
    return ACC

# short
def CHECK_NOUN(WORDS, LIMIT):
    return len(WORDS) < LIMIT
""",
    ),
    domain(
        packages="weather climate station",
        modules="rain wind sensor",
        nouns="storm rain wind cloud",
        functions="""
# range
def BOUND_NOUN(AMOUNT, LOW, HIGH):
    return max(LOW, min(AMOUNT, HIGH))

# freezing
def CHECK_NOUN(ITEMS):
    return min(ITEMS) == 0

# change (held out)
def COMPUTE_NOUN(ITEMS):
    return ITEMS[-1] - ITEMS[0]

# wet days (held out)
def TALLY_NOUN(ITEMS, LIMIT):
    return sum(1 for EACH in ITEMS if EACH > LIMIT)

# warmer
def CHECK_NOUN(AMOUNT1, AMOUNT2, RATE):
    return AMOUNT1 - AMOUNT2 >= RATE

# feels
def COMPUTE_NOUN(AMOUNT, RATE):
    if RATE > {2|5}:
        return AMOUNT - RATE
    return AMOUNT + 1

# drop
def COMPUTE_NOUN(ITEMS, AMOUNT):
    ACC = AMOUNT
    for EACH in ITEMS:
        ACC -= EACH
    return ACC
""",
    ),
    domain(
        packages="office mail desk",
        modules="inbox letter staff",
        nouns="letter desk task mail",
        functions="""
# unread
def COMPUTE_NOUN(COUNT, AMOUNT, RATE):
    return COUNT + AMOUNT * RATE

# valid address
def CHECK_NOUN(TEXT, PART):
    return len(TEXT) > {2|5} and TEXT.endswith(PART)

# subject
def FORMAT_NOUN(TEXT):
    return TEXT.rstrip() + "."

# without last
def PICK_NOUN(WORDS):
    return WORDS[:len(WORDS) - 1]

# free (held out)
def CHECK_NOUN(LOW, HIGH, AMOUNT):
    return AMOUNT < LOW or AMOUNT > HIGH

# overtime (held out)
def COMPUTE_NOUN(ITEMS, LIMIT):
    ACC = 0
    for EACH in ITEMS:
        ACC += max(EACH - LIMIT, 0)
    return ACC

# urgent
def CHECK_NOUN(FLAG, COUNT, LIMIT):
    if FLAG:
        return True
    return COUNT >= LIMIT
""",
    ),
    domain(
        packages="clinic ward health",
        modules="patient nurse visit",
        nouns="dose visit bed patient",
        functions="""
# dose
def BOUND_NOUN(AMOUNT, RATE, LIMIT):
    ACC = AMOUNT * RATE
    return min(ACC, LIMIT)

# fever
def CHECK_NOUN(AMOUNT, LIMIT):
    if AMOUNT > LIMIT:
        return True
    return False

# waiting (held out)
def TOTAL_NOUN(ITEMS, RATE):
    ACC = 0
    for EACH in ITEMS:
        ACC += max(EACH, RATE)
    return ACC

# beds
def TALLY_NOUN(COUNT, RATE):
    return (COUNT + RATE - 1) // RATE

# highest
def PICK_NOUN(ITEMS, PLACE):
    return max(ITEMS[PLACE:])

# next visit
def COMPUTE_NOUN(COUNT, AMOUNT):
    return (COUNT + AMOUNT) % 7

# same
def CHECK_NOUN(TEXT1, TEXT2):
    return TEXT1.lower() == TEXT2.lower()
""",
    ),
    domain(
        packages="parking garage traffic",
        modules="meter gate lane",
        nouns="car lane gate fare",
        functions="""
# fare
def COMPUTE_NOUN(COUNT, RATE, LIMIT):
    return min(COUNT * RATE, LIMIT)

# level
def COMPUTE_NOUN(COUNT, RATE):
    return COUNT // RATE + 1

# may enter
def CHECK_NOUN(FLAG1, FLAG2, COUNT):
    return (FLAG1 or FLAG2) and COUNT > 0

# last even
def COMPUTE_NOUN(AMOUNT):
    if AMOUNT % 2 == 0:
        return AMOUNT
    return AMOUNT - 1

# below (held out)
def TOTAL_NOUN(ITEMS, LIMIT, AMOUNT):
    ACC = AMOUNT
    for EACH in ITEMS:
        if EACH < LIMIT:
            ACC -= EACH
    return ACC

# plate
def FORMAT_NOUN(TEXT, COUNT):
    return TEXT.upper() * COUNT

# queue
def PICK_NOUN(ITEMS, LIMIT):
    return [min(EACH, LIMIT) for EACH in ITEMS]
""",
    ),
)
