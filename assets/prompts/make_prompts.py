"""Writes train.jsonl, eval-math.jsonl and eval-chat.jsonl beside this file.

All texts and templates were written for this project. The output is a pure function of this file:
run it again after a change and commit both. Needs Python 3.9 or later, standard library only.
"""

import json
import random
from pathlib import Path

NAMES = [
    "Ada", "Bruno", "Chiara", "Dmitri", "Elif", "Farid", "Greta", "Hana", "Ivo", "Jamila", "Kofi",
    "Lena", "Mateo", "Nadia", "Oskar", "Priya", "Quinn", "Rosa", "Sven", "Tariq", "Ulla", "Vera",
    "Wei", "Yara", "Zoltan",
]
THINGS = [
    "apples", "marbles", "stickers", "postcards", "shells", "pencils", "buttons", "beads", "plums",
    "stamps", "candles", "cookies", "tickets", "walnuts", "bricks", "tulips",
]
PLACES = ["library", "bakery", "museum", "school", "market", "farm", "workshop", "harbour", "garden"]
HOLDERS = ["boxes", "baskets", "bags", "jars", "crates", "drawers", "trays"]

# Arithmetic templates: a name of the template and a function of a random generator.
# The last four are used for the evaluation suite only.


def two(rng, items):
    """Two different items."""
    return rng.sample(items, 2)


def boxes(r):
    return (f"{r.choice(NAMES)} fills {r.randint(3, 12)} {r.choice(HOLDERS)} with {r.randint(4, 15)} "
            f"{r.choice(THINGS)} each. How many is that in total?")


def give_away(r):
    a, b = two(r, NAMES)
    total = r.randint(30, 90)
    return (f"{a} has {total} {r.choice(THINGS)} and gives {r.randint(5, 25)} of them to {b}. "
            "How many are left?")


def twice_as_many(r):
    a, b = two(r, NAMES)
    return (f"{a} collected {r.randint(6, 40)} {r.choice(THINGS)}. {b} collected "
            f"{r.choice(['twice', 'three times', 'four times'])} as many. How many do they have together?")


def share(r):
    people, each = r.randint(3, 9), r.randint(4, 14)
    return (f"{people} friends share {people * each} {r.choice(THINGS)} equally. "
            "How many does each of them get?")


def shopping(r):
    price, count = r.randint(2, 9), r.randint(3, 8)
    paid = price * count + r.randint(1, 20)
    return (f"At the {r.choice(PLACES)}, {r.choice(NAMES)} buys {count} things for {price} dollars each "
            f"and pays with {paid} dollars. How much change comes back?")


def reading(r):
    pages, days = r.randint(12, 35), r.randint(4, 9)
    return (f"{r.choice(NAMES)} reads {pages} pages every day. How many pages is that after {days} days, "
            f"and how many are left of a book with {pages * days + r.randint(10, 60)} pages?")


def trip(r):
    speed, hours = r.choice([40, 50, 60, 70, 80]), r.randint(2, 6)
    return f"A bus drives {speed} kilometres an hour for {hours} hours. How far does it get?"


def savings(r):
    return (f"{r.choice(NAMES)} saves {r.randint(3, 15)} dollars a week and already has "
            f"{r.randint(10, 60)} dollars. How much money will there be after {r.randint(4, 12)} weeks?")


def rows_of_seats(r):
    rows, seats = r.randint(6, 15), r.randint(8, 20)
    return (f"A hall has {rows} rows of {seats} seats. {r.randint(10, rows * seats - 10)} seats are taken. "
            "How many are free?")


def older(r):
    a, b = two(r, NAMES)
    return (f"{a} is {r.randint(8, 40)} years old. {b} is {r.randint(2, 9)} years older. "
            f"How old will {b} be in {r.randint(3, 12)} years?")


def recipe(r):
    cups = r.randint(2, 5)
    people = r.choice([4, 6])
    return (f"A soup for {people} people needs {cups} cups of beans. How many cups are needed for "
            f"{people * r.randint(2, 5)} people?")


def legs(r):
    return (f"On a farm there are {r.randint(3, 15)} cows and {r.randint(4, 20)} hens. "
            "How many legs do they have altogether?")


def half_sold(r):
    start = 2 * r.randint(10, 40)
    return (f"A shop at the {r.choice(PLACES)} starts the day with {start} {r.choice(THINGS)}, sells half of "
            f"them in the morning and {r.randint(2, start // 2 - 2)} in the afternoon. How many remain?")


def garden(r):
    return (f"A rectangular garden is {r.randint(5, 20)} metres long and {r.randint(3, 12)} metres wide. "
            f"What is its {r.choice(['area', 'perimeter'])}?")


def wages(r):
    return (f"{r.choice(NAMES)} earns {r.randint(8, 20)} dollars an hour and works {r.randint(3, 8)} hours on "
            f"each of {r.randint(2, 6)} days. How much is earned?")


def difference(r):
    a, b = two(r, NAMES)
    return (f"{a} walked {r.randint(20, 60)} hundred steps and {b} walked {r.randint(5, 19)} hundred steps. "
            f"How many steps more did {a} walk?")


def bus_stop(r):
    start = r.randint(15, 40)
    return (f"There are {start} people on a tram. At a stop {r.randint(3, 12)} get off and {r.randint(2, 15)} "
            "get on. How many people are on the tram now?")


def plain_sum(r):
    return f"What is {r.randint(12, 99)} {r.choice(['plus', 'minus', 'times'])} {r.randint(2, 11)}?"


def minutes(r):
    return (f"One lesson takes {r.choice([25, 30, 40, 45])} minutes. How many minutes do {r.randint(3, 8)} "
            "lessons take?")


def packs(r):
    size = r.choice([4, 6, 8, 10, 12])
    need = size * r.randint(3, 9)
    return f"{r.choice(THINGS).capitalize()} come in packs of {size}. How many packs hold {need} of them?"


def ladder(r):
    step = r.randint(2, 5)
    return (f"A snail climbs {step + r.randint(1, 4)} metres every day and slides back {step} metres every "
            f"night. How high is it after {r.randint(3, 9)} days and nights?")


def tank(r):
    rate, time = r.randint(4, 15), r.randint(5, 20)
    return (f"A tap fills a tank with {rate} litres a minute. The tank holds {rate * time} litres. "
            "How many minutes does it take to fill it?")


def two_prices(r):
    return (f"A ticket costs {r.randint(8, 15)} dollars for an adult and {r.randint(3, 7)} dollars for a "
            f"child. What do {r.randint(2, 4)} adults and {r.randint(2, 6)} children pay?")


def broken(r):
    held, count = r.randint(6, 12), r.randint(4, 9)
    return (f"{r.choice(NAMES)} carries {count} trays with {held} glasses each and breaks "
            f"{r.randint(2, held)} glasses. How many glasses are still whole?")


TRAIN_MATH = [
    boxes, give_away, twice_as_many, share, shopping, reading, trip, savings, rows_of_seats, older,
    recipe, legs, half_sold, garden, wages, difference, bus_stop, plain_sum, minutes, packs,
]
EVAL_MATH = [ladder, tank, two_prices, broken, boxes, shopping, savings, rows_of_seats, wages, share]

QUESTIONS = [
    "Why is the sky blue?",
    "How do bees make honey?",
    "What is the difference between weather and climate?",
    "Why do leaves change colour in autumn?",
    "How does a bicycle stay upright?",
    "What are the three states of matter?",
    "Why do we need sleep?",
    "What does a compass do?",
    "How is bread made?",
    "Why is the sea salty?",
    "What is a volcano?",
    "How do plants drink water?",
    "What is the moon made of?",
    "Why do cats purr?",
    "How can I remember names better?",
    "What should I pack for a weekend in the mountains?",
    "How do I boil an egg?",
    "What are some healthy snacks?",
    "How can I stay calm before an exam?",
    "What is a good way to start a conversation?",
    "Give me three reasons to learn to swim.",
    "Name five animals that live in the forest.",
    "Name four things you find in a kitchen.",
    "List the seasons of the year and one thing to do in each.",
    "List three uses for an old newspaper.",
    "Which is heavier, a kilogram of iron or a kilogram of wool?",
    "What is the opposite of generous?",
    "Which word means the same as quick?",
    "What is the plural of mouse?",
    "How many days does a leap year have?",
    "What colours do you get when you mix blue and yellow?",
    "What comes after Wednesday?",
    "What does a doctor do?",
    "What does a librarian do all day?",
    "Explain what a budget is to a child.",
    "Explain how a candle burns.",
    "Explain gravity in two sentences.",
    "Explain why we brush our teeth.",
    "Explain the rules of hide and seek.",
    "What is the internet?",
    "How does a refrigerator keep food cold?",
    "Why do birds fly south in winter?",
    "What is recycling good for?",
    "How can I save water at home?",
    "What makes a good friend?",
    "How do I write a thank-you note?",
    "What is a prime number?",
    "How do you find the average of three numbers?",
    "What is the difference between a fruit and a vegetable?",
    "Why do people tell stories?",
    "How do I take care of a houseplant?",
    "What can I do on a rainy day?",
    "How do I tie a knot that does not slip?",
    "Why do we have time zones?",
    "What is an echo?",
    "How do magnets work?",
    "What do whales eat?",
    "Why does ice float?",
    "How long should I cook rice?",
    "What is the best way to clean a window?",
    "How do I choose a present for a friend who has everything?",
    "Is it better to read a book or to watch the film first?",
    "What are the advantages of travelling by train?",
    "What are the disadvantages of living in a big city?",
    "How can a small shop find new customers?",
    "What should a good report contain?",
    "How do I say no politely?",
    "What is a habit, and how do I change one?",
    "Why should I learn a second language?",
    "What are the parts of a flower?",
]

WRITING = [
    "Write a short poem about {}.",
    "Write two sentences about {}.",
    "Write a short story about {}.",
    "Describe {} to someone who has never seen it.",
    "Make up a title and a first sentence for a book about {}.",
    "Write a friendly message that mentions {}.",
    "Give me a list of five words that fit {}.",
    "Write a short advertisement for {}.",
]
TOPICS = [
    "a lighthouse", "the first snow", "an old clock", "a lost glove", "a market in the morning",
    "a quiet lake", "a train at night", "a new neighbour", "a kite", "a garden after the rain",
    "a paper boat", "a cup of tea", "a busy street", "a stone bridge", "a sleepy dog",
    "a letter without a name", "a harvest", "a long walk", "a birthday cake", "a blue door",
    "a thunderstorm", "a small island", "a music box", "a school trip", "a fox in the city",
]

TASKS = [
    "Turn this into a question: The shop opens at nine.",
    "Make this sentence more polite: Send me the file today.",
    "Shorten this sentence: Because of the fact that it was raining, we made the decision to stay at home.",
    "Correct the spelling: I recieved you're mesage yestarday.",
    "Put these words in alphabetical order: river, apple, tower, cloud, bridge.",
    "Write an e-mail to a colleague asking to move a meeting to Friday.",
    "Write an invitation to a small summer party.",
    "Write three questions for an interview with a baker.",
    "Suggest a name for a cafe that sells only soup.",
    "Suggest a slogan for a bicycle repair shop.",
    "Rewrite in the past tense: She walks to the station and buys a ticket.",
    "Rewrite this so that a child understands it: The vehicle is propelled by an electric motor.",
    "Is this review positive or negative? The room was cold, but the staff were kind and helpful.",
    "Find the odd one out: carrot, potato, hammer, onion.",
    "Continue the story: When the lights went out, everybody laughed except the old captain.",
    "Continue the list: one, two, four, eight.",
    "Plan a simple dinner for four people.",
    "Plan a morning routine for somebody who gets up late.",
    "Write a to-do list for moving to a new flat.",
    "Summarise in one sentence: The town built a new bridge. Before, people had to take a ferry, "
    "which did not run in winter. Now they can cross at any time.",
    "Write a dialogue of four lines between a teacher and a pupil who is late.",
    "Give instructions for making a paper plane.",
    "Write a riddle whose answer is a shadow.",
    "Translate the idea of the proverb 'many hands make light work' into plain words.",
    "Compare a bus and a bicycle in three sentences.",
    "Argue for a later start of the school day.",
    "Argue against eating lunch at the desk.",
    "Write a weather report for an imaginary planet.",
    "Write a diary entry of a cat.",
    "Describe your ideal weekend in three sentences.",
]


def math_prompts(rng, templates, count, used):
    """`count` different prompts, the templates in turn."""
    prompts = []
    while len(prompts) < count:
        text = templates[len(prompts) % len(templates)](rng)
        if text not in used:
            used.add(text)
            prompts.append(text)
    return prompts


def writing_prompts(rng):
    """Every topic with three different templates."""
    return [template.format(topic) for topic in TOPICS for template in rng.sample(WRITING, 3)]


def rows(prefix, prompts):
    for index, text in enumerate(prompts):
        yield {
            "id": f"{prefix}-{index:03}",
            "conversations": [{"role": "user", "content": text}],
            "source": "draftsmith",
        }


def write(name, lines):
    path = Path(__file__).with_name(name)
    text = "".join(json.dumps(line, ensure_ascii=True) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8", newline="\n")


def main():
    rng = random.Random(2024)
    used = set()
    eval_math = math_prompts(rng, EVAL_MATH, 30, used)
    train_math = math_prompts(rng, TRAIN_MATH, 175, used)
    chat = QUESTIONS + TASKS + writing_prompts(rng)
    assert len(set(chat)) == len(chat)
    rng.shuffle(chat)
    eval_chat, train_chat = chat[:30], chat[30:]
    train = train_math + train_chat
    rng.shuffle(train)
    write("train.jsonl", rows("train", train))
    write("eval-math.jsonl", rows("math", eval_math))
    write("eval-chat.jsonl", rows("chat", eval_chat))


if __name__ == "__main__":
    main()
