"""Names and values that facts are made of, split once and for all into a training part and a held-out part.

A checksum of the lower-case word decides, so that there is no second list to keep in step: ``is_held_out`` answers for
curated words, invented words and numbers alike. Training draws from one side only, scenarios and evaluation from the
other.
"""

from __future__ import annotations

import random
import zlib
from functools import cache

HELD_OUT_SHARE = 5
"""One word in this many is held out."""

_POOLS = {
    "name": """
        Ada Alan Alice Amara Amir Andrea Anika Anton Aria Arjun Astrid Aya Bashir Beatrix Ben Bianca Boris Brigid
        Bruno Camila Carlos Caspar Cecilia Chen Chloe Clara Cyrus Dalia Damian Daniel Daria David Devi Diego Dmitri
        Edith Eduardo Eleanor Elif Elias Emeka Emma Enzo Erik Esther Ethan Eva Fatima Felix Fiona Florian Frank Freya
        Gabriel Gemma George Gideon Grace Greta Gustav Hana Harold Hassan Hazel Helena Henry Hiro Hugo Ibrahim Ida Igor
        Imani Ines Ingrid Iris Isaac Ivan Ivy Jack Jamal Jane Jasper Javier Joan Johan Jonas Julia Kai Karim Kate Keiko
        Kenji Khalid Kofi Lara Lars Laura Leila Leo Lena Liam Lina Linus Lola Louis Lucia Luca Magnus Maia Malik Marco
        Maria Marta Mateo Maya Mei Mia Milan Mira Mohamed Mona Nadia Naomi Nia Nico Nina Noah Noor Nora Odin Olga
        Oliver Olivia Omar Oscar Otto Paula Pedro Petra Philip Pia Priya Quentin Rafael Rania Ravi Rebecca Rosa Ruben
        Ruth Sadia Samir Samuel Sara Sergei Simon Sofia Soren Stella Sven Tara Tariq Theo Thomas Tilda Tim Tom Tomas
        Uma Ursula Valentina Vera Victor Viola Walter Wanda Wendy Xavier Yara Yasmin Yuki Yusuf Zara Zelda Zoe""",
    "pet": """
        Rex Bella Luna Max Milo Coco Buddy Rocky Daisy Lucky Molly Bailey Pepper Shadow Ginger Biscuit Muffin Oreo
        Whiskers Smokey Patch Pickle Nugget Waffles Pebbles Ziggy Simba Nala Bandit Scout Rusty Sparky Toffee Marble
        Noodle Bubbles Snowball Socks Tiger Mittens Hopper Clover Maple Juno Apollo Pixel Widget Fudge""",
    "city": """
        Paris London Berlin Madrid Rome Oslo Vienna Lisbon Dublin Prague Warsaw Athens Helsinki Stockholm Copenhagen
        Zurich Geneva Munich Hamburg Cologne Milan Naples Turin Florence Venice Barcelona Seville Porto Lyon Nice
        Marseille Bordeaux Brussels Antwerp Amsterdam Rotterdam Utrecht Edinburgh Glasgow Leeds Bristol Oxford Boston
        Chicago Denver Seattle Austin Dallas Houston Atlanta Miami Portland Toronto Montreal Vancouver Ottawa Quito Lima
        Bogota Santiago Havana Cairo Tunis Accra Lagos Nairobi Kampala Dakar Rabat Istanbul Ankara Tehran Baghdad Dubai
        Doha Muscat Mumbai Delhi Chennai Kolkata Dhaka Karachi Lahore Kathmandu Colombo Bangkok Hanoi Jakarta Manila
        Singapore Seoul Busan Tokyo Osaka Kyoto Sapporo Beijing Shanghai Taipei Sydney Melbourne Perth Brisbane Adelaide
        Auckland Wellington Tallinn Riga Vilnius Bergen Malmo Gdansk Krakow Budapest Bucharest Sofia Belgrade Zagreb
        Reykjavik Honolulu Nashville Memphis Phoenix Tucson Leipzig Dresden Bremen Basel Salzburg Granada Valencia
        New_York San_Francisco Los_Angeles Buenos_Aires Cape_Town Hong_Kong Tel_Aviv Mexico_City""",
    "country": """
        France Germany Spain Italy Portugal Norway Sweden Finland Denmark Iceland Ireland Scotland Poland Austria Greece
        Turkey Egypt Morocco Kenya Ghana Nigeria Ethiopia India Nepal China Japan Korea Vietnam Thailand Indonesia
        Australia Canada Mexico Brazil Chile Peru Argentina Colombia Cuba Jamaica Estonia Latvia Croatia Hungary Romania
        Bulgaria Malta Cyprus Jordan Lebanon Senegal Tanzania Uganda Uruguay Bolivia Panama New_Zealand South_Africa""",
    "colour": """
        red blue green yellow orange purple pink brown black white grey teal turquoise violet indigo magenta crimson
        scarlet maroon beige ivory gold silver bronze copper olive lime mint navy cyan lavender lilac coral salmon peach
        amber ruby emerald sapphire jade mustard charcoal cream khaki burgundy apricot aquamarine plum dark_blue
        light_green sky_blue bright_red""",
    "food": """
        pizza pasta sushi ramen curry tacos burritos lasagna risotto paella dumplings noodles soup salad bread cheese
        chocolate pancakes waffles omelette falafel hummus kebab goulash pierogi gnocchi ravioli fondue couscous tofu
        tempeh stew chili burgers sandwiches fries steak chicken fish salmon shrimp lobster rice beans lentils potatoes
        mushrooms spinach broccoli carrots tomatoes cucumbers onions garlic peppers corn peas apples bananas oranges
        grapes cherries mangoes peaches pears plums strawberries blueberries pineapple melon lemon ice_cream apple_pie
        fried_rice peanut_butter mac_and_cheese fish_and_chips fruit_salad tomato_soup""",
    "drink": """
        coffee tea milk water juice lemonade cola cocoa espresso cappuccino latte matcha cider kombucha smoothies wine
        beer ginger_ale green_tea black_coffee mint_tea orange_juice hot_chocolate apple_juice iced_tea""",
    "animal": """
        dog cat horse rabbit hamster parrot turtle snake lizard goldfish ferret canary pigeon duck goose goat sheep cow
        pig donkey tiger lion bear wolf fox otter beaver badger hedgehog squirrel deer moose elephant giraffe zebra
        panda koala kangaroo penguin owl eagle falcon swan dolphin whale shark octopus bee ant spider crab frog
        axolotl gecko iguana llama alpaca camel seal walrus raccoon""",
    "job": """
        baker teacher doctor nurse engineer lawyer plumber carpenter painter writer editor actor singer dancer drummer
        pilot sailor farmer gardener florist butcher chef waiter barber tailor jeweller architect astronomer biologist
        chemist physicist geologist historian librarian journalist photographer translator programmer designer manager
        accountant banker cashier driver mechanic electrician welder miner firefighter detective judge dentist surgeon
        pharmacist veterinarian therapist coach referee soldier postman beekeeper locksmith potter cartographer optician
        bus_driver data_scientist civil_engineer piano_tuner tour_guide""",
    "hobby": """
        chess painting reading writing hiking climbing swimming running cycling skiing skating surfing sailing rowing
        fishing gardening cooking baking knitting sewing pottery photography astronomy birdwatching dancing singing yoga
        boxing fencing archery juggling karate judo origami calligraphy gaming camping kayaking woodworking drawing
        stamp_collecting rock_climbing bird_watching playing_cards""",
    "sport": """
        football tennis basketball volleyball cricket rugby hockey baseball golf badminton handball squash boxing
        fencing rowing swimming cycling skiing curling judo karate archery surfing snooker darts table_tennis water_polo
        ice_hockey""",
    "instrument": """
        piano guitar violin cello viola flute clarinet oboe bassoon trumpet trombone tuba saxophone harp drums banjo
        ukulele mandolin accordion organ harmonica bagpipes recorder sitar xylophone double_bass""",
    "language": """
        English French German Spanish Italian Portuguese Dutch Swedish Norwegian Danish Finnish Icelandic Irish Welsh
        Polish Czech Greek Turkish Arabic Hebrew Persian Hindi Bengali Tamil Urdu Chinese Japanese Korean Vietnamese
        Thai Swahili Yoruba Zulu Russian Ukrainian Latin Esperanto Hungarian Estonian Basque""",
    "flower": """
        roses tulips lilies daisies orchids violets sunflowers daffodils irises poppies peonies dahlias marigolds
        lavender jasmine camellias begonias hydrangeas magnolias snowdrops bluebells""",
    "month": "January February March April May June July August September October November December",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "season": "spring summer autumn winter",
    "item": """
        milk eggs bread butter cheese flour sugar salt rice pasta tea coffee apples bananas onions soap candles
        batteries matches paper pens string tape nails screws paint glue shampoo toothpaste towels socks gloves
        scarf boots hat umbrella tent torch rope map compass knife lamp kettle pan plates cups spoons napkins
        yoghurt honey jam olives nuts raisins oats vinegar pepper cinnamon lemons limes carrots lettuce radishes
        celery leeks beetroot tofu""",
    "thing": """
        keys wallet phone passport umbrella glasses laptop book camera bicycle suitcase notebook headphones watch ring
        hammer ladder guitar scarf jacket ticket letter box bag lamp charger tent map telescope drill kettle remote
        screwdriver racket skateboard helmet blanket vase medal puzzle diary spare_key red_box toolbox""",
    "spot": """
        kitchen garage attic basement garden office bedroom hallway drawer cupboard car closet shed cellar library
        living_room bathroom desk fridge shelf top_drawer blue_cabinet locker backpack balcony barn study pantry
        front_pocket glove_box workshop bed table sofa window door mat couch piano tree wardrobe stairs""",
}

UNSPLIT = ("day", "month", "season")
"""Kinds too small to be split: all of their words are training words."""

_ONSETS = [
    "b",
    "br",
    "c",
    "ch",
    "cl",
    "d",
    "dr",
    "f",
    "fl",
    "g",
    "gr",
    "h",
    "j",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "qu",
    "r",
    "s",
    "sh",
    "sk",
    "st",
    "t",
    "th",
    "tr",
    "v",
    "w",
    "y",
    "z",
]
_VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "au", "ea", "ee", "ia", "io", "oo", "ou"]
_CODAS = ["", "", "", "", "n", "r", "l", "s", "x", "m", "k", "nd", "ck", "th", "rt", "b", "z"]


def is_held_out(word: str) -> bool:
    """Whether a word (a number, a phrase) may appear in scenarios and evaluation only."""
    return zlib.crc32(word.lower().encode()) % HELD_OUT_SHARE == 0


@cache
def pool(kind: str, held_out: bool) -> tuple[str, ...]:
    """The curated words of one kind on one side of the split.

    Kinds too small to be split (days, months, seasons) are training words only; asking for their held-out side
    raises ``ValueError``.
    """
    words = [word.replace("_", " ") for word in _POOLS[kind].split()]
    if kind in UNSPLIT:
        if held_out:
            raise ValueError(f"no held-out words of kind {kind!r}")
        return tuple(words)
    return tuple(dict.fromkeys(word for word in words if is_held_out(word) == held_out))


def invented_word(rng: random.Random, held_out: bool) -> str:
    """A pronounceable lower-case word of one to three syllables that is (almost always) in no dictionary."""
    while True:
        count = rng.choice((1, 2, 2, 2, 3))
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(count))
        if len(word) >= 3 and is_held_out(word) == held_out:
            return word


def invented_name(rng: random.Random, held_out: bool) -> str:
    """An invented word with a capital."""
    return invented_word(rng, held_out).capitalize()


@cache
def _all_words(held_out: bool) -> tuple[str, ...]:
    return tuple(word for kind in _POOLS if kind not in UNSPLIT for word in pool(kind, held_out))


def spliced_word(rng: random.Random, held_out: bool) -> str:
    """The beginning of one curated word and the end of another: familiar pieces in an order never seen."""
    while True:
        first, second = rng.choice(_all_words(held_out)), rng.choice(_all_words(held_out))
        word = (first[: rng.randint(2, 5)] + second[-rng.randint(2, 5) :]).replace(" ", "")
        word = word.lower() if rng.random() < 0.5 else word.capitalize()
        if is_held_out(word) == held_out:
            return word


def accented_word(rng: random.Random, held_out: bool) -> str:
    """A word with letters beyond a to z."""
    while True:
        letters = list(invented_word(rng, held_out))
        for _ in range(rng.choice((1, 1, 2))):
            letters[rng.randrange(len(letters))] = rng.choice(
                "\u00e9\u00e8\u00fc\u00f6\u00e4\u00e5\u00f8\u00f1\u00e7\u0161\u017e\u00ed\u00f3\u00e1\u0142\u00df\u00eb\u00ea\u00e2\u00ef\u00f4\u00fa\u0144\u0107\u0119\u011f\u010d"
            )
        word = "".join(letters)
        if is_held_out(word) == held_out:
            return word


def scrambled_word(rng: random.Random, held_out: bool) -> str:
    """Random letters: nothing but copying letter by letter can reproduce it."""
    while True:
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
        if is_held_out(word) == held_out:
            return word


def number(rng: random.Random, digits: int, held_out: bool) -> str:
    """A decimal number with exactly this many digits, no leading zero."""
    while True:
        text = str(rng.randint(10 ** (digits - 1), 10**digits - 1))
        if is_held_out(text) == held_out:
            return text


def code(rng: random.Random, held_out: bool) -> str:
    """A short code of capitals and digits, as on a locker or a ticket."""
    while True:
        text = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ23456789") for _ in range(rng.randint(3, 6)))
        if is_held_out(text) == held_out:
            return text
